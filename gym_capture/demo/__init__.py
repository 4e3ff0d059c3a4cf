"""The demo: the main job on a real small model, from serving to one training step, with its checks."""
