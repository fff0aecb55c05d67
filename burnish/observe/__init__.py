"""Records of a run, and their display. Nothing here changes the run.

Reading order: metrics (numbers per step), timeline (where the time went), memory, progress (the
terminal and ``run.log``), samples (what the model wrote), report (one HTML page made of all of it).
A run folder holds::

    config.yaml          the resolved recipe
    metrics.jsonl        one JSON object per log call (trackers receive the same)
    samples/*.parquet    prompts and responses
    timeline.json        Chrome trace; ui.perfetto.dev opens it
    checkpoints/         see burnish.checkpoint
    report.html          one page that needs no network
    run.log              what was printed, with times
"""
