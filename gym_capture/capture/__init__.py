"""Capture: what is recorded of a model call, and the seams that it is written and read through.

Start at `records` (the record of a call), then `operations` (what can be said of a rollout), `protocols` (stores and
sources), `rollout_state` (what a store knows of one rollout) and `codec` (bytes).
"""
