"""Load rows from files, hubs and environments and encode them, in an exactly resumable order.

Reading order: sources (rows), chat (rows to token-exact ids and masks), stream (row order), encoded
(encoded rows in that order, with the length limit), batches; then the folders of the kinds of
data, with one encoder each.
"""
