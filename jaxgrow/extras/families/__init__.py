"""How are the models of `jaxgrow.extras.models` stored? One file for each family."""
