"""Ray itself, whoever uses it: the environment of its processes, and the answers of its actors."""
