"""What a run came to, written down and shown; whether it is well. It reads reports and never touches the run.

settings     what a recipe may say of it
watch        the hook that a run calls after each step, with everything below behind it
reading      a report as plain numbers, and as a line of metrics.jsonl
meters       speed, time left, MFU, data wait, gauges: from a clock that stops during pauses
health       numbers that are not finite, steps without labels, gradients that are nothing: when to stop
jsonl        metrics.jsonl and events.jsonl: whole again after a crash, cut at resume
books        the run's own files, and what it is told of a run at its start
history      the points of the whole run, and trainer_state.json
sinks        what is told to the outside, through queues that keep it away from the step
console      a live display, or plain lines
tensorboard  event files
plot         loss.png, and the curve as text
environment  environment.json, without secrets
"""
