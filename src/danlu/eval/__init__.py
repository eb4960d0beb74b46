"""How good a model is.

perplexity  the loss over the whole validation set; the rule of early stopping
"""
