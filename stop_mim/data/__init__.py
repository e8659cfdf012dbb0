"""Images, from a dataset to batches on a device.

`sources/` opens a dataset by name as an `ImageSource` (image_source.py). `Batches` (batches.py) loads its images onto a device:
an order (order.py) selects the images of each batch, and a view (augment.py) crops and augments them. Images are read from
memory (stored.py), decoded by worker processes (streamed.py), or decoded on the GPU (gpu_decode.py).
"""
