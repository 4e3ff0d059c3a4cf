"""Lineage: which earlier call of the same rollout a request continues, found when the request arrives.

Start at `fingerprint` (what makes two conversations the same), then `index` (finding the call), `echoes` (turns as
clients are known to hand them back) and `cache` (many rollouts in bounded memory).
"""
