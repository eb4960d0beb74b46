"""What gradients become: the optimisation layer (优化算法层) of the step.

schedule   the learning rate of each update, as a share of its peak
groups     which weights are updated alike: by role, what decays, and whose rate is another
clip       gradients within bounds: their common norm, then each number
average    the moving average of the weights
common     what every optimiser is told, and what it says of the state that it keeps
own        what moves weights: this rank's rows of each with their state, and sums over the rows of other ranks
states     where an optimiser's states are between updates
sharing    whole matrices, a rank's share of them each
adamw      AdamW, by torch's fused kernel
adamw8bit  AdamW with moments of 8 bits
blocks     numbers kept in 8 bits, a scale for each block
lamb       LAMB: each weight moves by a share of its norm
lion       Lion: the sign of a momentum
adafactor  Adafactor: second moments as a row and a column
muon       Muon: orthogonal momentum of the blocks' matrices, AdamW for the rest
sgd        SGD with momentum
kinds      all of them, of which a recipe names one
told       what check says of it: groups, what decays, rates, bytes
layer      the object that a step uses: clip, step, zero; its state by parameter name
"""
