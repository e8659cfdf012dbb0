"""Images, from a dataset to batches on a device.

`sources/` opens a dataset by its name as an `ImageSource` (image_source.py). An order (order.py) says which images make a
batch. `Batches` (batches.py) keeps them decoded in memory (stored.py) or streams them from worker processes (lookahead.py):
it reads and decodes them (decode.py) and shows a view of them (augment.py).
"""
