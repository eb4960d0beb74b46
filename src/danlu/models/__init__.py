"""Models as single-device PyTorch: parts, one trunk made of them, and the families that name them.

shape      what a decoder is made of: sizes and kinds of parts, free of any family
attention  grouped-query causal attention; a packed document sees itself alone on every path
blockwise  the same in blocks of queries, for compiled code on a CPU
rope       rotary positions, with phases in fp32 or better
product    the product by a weight, by the machine's fastest kernel
linear     linear products in fp8, with a scale a tensor
mlp        the feed-forward part, gated or plain
norm       RMSNorm and LayerNorm
stack      the trunk: embedding, blocks, last norm; gives hidden states
heads      ends of a model: score labels in chunks
start      initial weights by role, depth and parameter name
roles      what each weight is: embedding, head, norm, bias, matrix; what optimisers and rates go by
count      parameters, and FLOPs a token costs
weights    strict load and save of Hugging Face folders
families   gpt2, llama: sizes, parts, Hugging Face names
"""
