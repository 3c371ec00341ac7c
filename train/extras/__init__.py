"""Extras of the trainer: what a reader of the methods may skip. They import the core, which never imports them."""
