"""``report.html``: one page about a run, and the data of that page for other pages.

Reading order: page.py (:func:`~burnish.report.page.page_of`: the data of the page of one run),
catalog.py (which metrics are in which chart), charts.py (their lines), times.py (the split of the
time), tables.py (memory and warnings), samples.py, build.py (the HTML file). ``assets/`` contains
the template and the files that every page of runs loads: page.css, charts.js, samples.js.
"""
