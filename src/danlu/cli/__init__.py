"""The doors: one file a verb. Nothing heavy is imported before a verb needs it.

main       the command: options shared by all verbs, failures as one sentence, exit codes
train      a model trains, on this process or on several
rollback   back to a checkpoint of a run, and on from there with named changes
generate   a model goes on with a text
check      everything short of training
recipes    the recipes that come with danlu, and every setting they may hold
tokenizer  a tokenizer is trained
doctor     what this machine can do
"""
