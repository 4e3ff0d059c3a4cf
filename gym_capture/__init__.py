"""Exact token capture for distributed agent rollouts. Start reading at `gym_capture.capture.records`."""
