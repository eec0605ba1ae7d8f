"""Pure parts: which tokens are targets, and what predicting them costs."""

from typing import Literal

Objective = Literal["mlm", "clm"]
