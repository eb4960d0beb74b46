"""All optimisers, of which a recipe names one."""

from __future__ import annotations

from danlu.optim.adafactor import Adafactor
from danlu.optim.adamw import AdamW
from danlu.optim.adamw8bit import AdamW8bit
from danlu.optim.lamb import Lamb
from danlu.optim.lion import Lion
from danlu.optim.muon import Muon
from danlu.optim.sgd import Sgd

Optimizer = AdamW | Lamb | Lion | Adafactor | Muon | Sgd | AdamW8bit
