"""How do the tensors and settings of Hugging Face models map to jaxgrow's? One file per family."""
