"""danlu (丹炉): raw text in, a trained language model out."""

__version__ = "0.1.0"
