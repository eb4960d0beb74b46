"""A recipe becomes a run, and the run goes round its step to the end.

assemble   a recipe becomes a run; the only place that knows the order
data       raw files become a run's sources
run        the state of one run
step       one update of the weights: the three layers meet there, and only there
loop       round the step: save, evaluate, leave, end
begin      the run folder is opened and compared; what watches is told
state      what a checkpoint holds of a run, and a run gone back to it
finish     the model is published, the prompts are continued
signals    told to stop from outside
"""
