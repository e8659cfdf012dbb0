"""Images, from a dataset to batches on a device.

`sources/` opens a dataset by its name as an `ImageSource` (image_source.py). `Batches` (batches.py) brings its images to a
device: an order (order.py) says which images make a batch, and a view (augment.py) what is shown of them. They are read from
memory (stored.py), decoded by worker processes (streamed.py), or decoded on the GPU (gpu_decode.py).
"""
