"""Record and display a run, without influencing it.

Reading order: metrics (numbers per step), timeline (time per phase), memory, progress (the terminal
and ``run.log``), samples (prompts and responses). burnish.runs reads a run folder, burnish.report
writes its page. A run folder contains::

    config.yaml          the resolved recipe
    resumes.jsonl        one JSON object per resume
    metrics.jsonl        one JSON object per log call (trackers receive the same)
    samples/*.parquet    prompts and responses
    timeline.json        Chrome trace; ui.perfetto.dev opens it
    checkpoints/         see burnish.checkpoint
    report.html          one page that works without a network
    run.log              the printed lines, with times
"""
