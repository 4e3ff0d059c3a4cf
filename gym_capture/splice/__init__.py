"""Splice: a prompt of the parent's exact ids and of what the chat template writes after them, or why there is none.

Start at `splicer`, then `template` (what is asked of a template), `turn_start` and `audit` (which turns of which
templates it works for).
"""
