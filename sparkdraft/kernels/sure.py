"""How sure a drafter can be of a draft: bounds that the host's arithmetic (speculation/) and the kernels share. No
torch."""

from __future__ import annotations

WIDEST = 8.0  # gaps are compared from -8 to 8; one that is not a number counts as the least sure
MOST_SURE = 0.999  # no draft is taken to be accepted with a larger chance
