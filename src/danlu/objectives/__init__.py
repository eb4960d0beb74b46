"""What is asked of a model: pure objects that count before the forward and sum after it.

causal     predict the next token
"""
