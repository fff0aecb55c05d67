"""A local web page over run folders, which may belong to runs that are running.

Reading order: library (the runs, and which files are read), metric_log (curves), step_rows (samples
of a step) and scan (search over all steps), lanes (time), app (the routes). The page is in
``assets/``: index.html, watch.css and watch.js, with the charts and conversations of the report
(``burnish/report``). Nothing is ever written into a run folder.
"""
