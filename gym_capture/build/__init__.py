"""Build: from a frozen rollout to trajectories, with every parent proven again and every token counted.

Start at `builder`, then `merge` (retries, records that came twice), `side_calls`, `inference` (parents of records that
name none) and `trajectories` (chains as flat arrays).
"""
