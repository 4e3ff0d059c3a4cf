"""Inspector: what was recorded and built, for a browser.

Start at `seen` (a rollout as it is shown), then `from_records` and `from_rows` (how it is made), `source` (the seam to
where rollouts come from, with one module for each), `library` (a source that is open) and `app` (HTTP). `views` makes
the JSON; docs/inspector.md says what is to be seen.
"""
