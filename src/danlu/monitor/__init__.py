"""What a run came to, written down and shown; whether it is well. It reads reports and never touches the run.

settings     what a recipe may say of it
watch        the hook that a run calls after each step, with everything below behind it
reading      a report as plain numbers, and as a line of metrics.jsonl
meters       speed, time left, MFU, data wait, gauges: from a clock that stops during pauses
health       whether the run is well, from all of the following: when to stop, when to go back
causes       what is likely behind an illness, and what would help
usual        what is usual for a number, by median and spread, and what is far above it
spikes       losses and norms far above the usual: which updates are not made, when the run goes back
trend        where the loss is going: falling, diverging, swinging, standing still
layers       norms layer by layer: gradients that explode, vanish, or do not come
noise        the gradient noise scale: which size of batch pays, and a word on it
order        whether samples come unshuffled, or the same ones again and again
jsonl        metrics.jsonl and events.jsonl: whole again after a crash, cut at resume
books        the run's own files, and what it is told of a run at its start
history      the points of the whole run, and trainer_state.json
sinks        what is told to the outside, through queues that keep it away from the step
console      a live display, or plain lines
tensorboard  event files
profile      a trace of some updates for Perfetto, and a page of text
plot         loss.png, and the curve as text
environment  environment.json, without secrets
"""
