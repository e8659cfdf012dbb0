"""How fast a folder of JPEGs is streamed, against torchvision's ImageFolder in a DataLoader with the same crops.

python benchmarks/loading.py                          photographs of 500x375 to 224, and images of 64x64 to 64
python benchmarks/loading.py --folder IMAGES --size 224
python benchmarks/loading.py --from-data DATA         real content, resized to the sizes above

Both sides deliver normalised batches on the device, and normalise there. Rounds alternate, and the median counts. "images/s"
is by the clock, "a core" by the processor time of all processes together, so that work cannot hide in another process.
"""

import argparse
import os

# As the command line has it, before torch is loaded: threads that wait by spinning would count as work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import resource
import statistics
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageDraw
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from stop_mim.data.augment import AugmentConfig, RandomCrop, normalise
from stop_mim.data.batches import Batches, Placement
from stop_mim.data.order import ShuffledOrder
from stop_mim.data.sources import open_source
from stop_mim.training.distributed import choose_device
from stop_mim.training.trial import wait_for

CASES = {"photographs": ((375, 500), 224, 90, 512), "small": ((64, 64), 64, 85, 4096)}
PREFETCH = 4


def painted(number, height, width):
    """Clouds of all scales, some shapes with edges, and grain: about as many bytes as a photograph of this size."""
    random = np.random.default_rng(number)
    picture = np.zeros((height, width, 3))
    for octave in range(7):
        rows, columns = (min(length, 3 * 2**octave) for length in (height, width))
        noise = PIL.Image.fromarray(random.integers(0, 256, (rows, columns, 3), dtype=np.uint8))
        picture += (np.asarray(noise.resize((width, height), PIL.Image.BICUBIC)) - 127.5) * 0.75**octave
    image = PIL.Image.fromarray((picture * 0.5 + 127.5).clip(0, 255).astype(np.uint8))
    draw = PIL.ImageDraw.Draw(image)
    for shape in (draw.ellipse, draw.rectangle) * 4:
        x, y = random.uniform(0, width), random.uniform(0, height)
        extent = random.uniform(0.05, 0.25, 2) * (width, height)
        shape((x, y, x + extent[0], y + extent[1]), fill=tuple(random.integers(0, 256, 3).tolist()))
    grain = random.normal(0, 18, (height, width, 1))
    return PIL.Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))


def pictures(data, count, height, width):
    if data is None:
        yield from (painted(number, height, width) for number in range(count))
        return
    source = open_source(data)
    for number in range(count):
        image = PIL.Image.fromarray(source.read(number % len(source)).permute(1, 2, 0).numpy())
        # Cut to the wanted proportions first, so that nothing is squashed.
        zoom = min(image.width / width, image.height / height)
        left, top = (image.width - zoom * width) / 2, (image.height - zoom * height) / 2
        box = (left, top, left + zoom * width, top + zoom * height)
        yield image.resize((width, height), PIL.Image.BICUBIC, box=box)


def write_folder(folder, data, count, height, width, quality):
    (folder / "class").mkdir(parents=True)
    for number, image in enumerate(pictures(data, count, height, width)):
        image.save(folder / "class" / f"{number:05d}.jpg", quality=quality)


def torchvision_batches(folder, size, batch_size, count, workers, device):
    crop = v2.RandomResizedCrop(
        size, scale=AugmentConfig().crop_scale, ratio=AugmentConfig().crop_ratio, antialias=True
    )
    dataset = ImageFolder(folder, v2.Compose([crop, v2.PILToTensor()]))
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=RandomSampler(dataset, num_samples=batch_size * count),
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=device.type == "cuda",
    )
    for pixels, _ in loader:
        yield normalise(pixels.to(device, non_blocking=True))


def our_batches(folder, size, batch_size, count, workers, device, decode):
    source = open_source(str(folder))
    order, view = ShuffledOrder(len(source), batch_size), RandomCrop(AugmentConfig(), (size, size))
    batches = Batches(source, order, view, Placement("streaming", decode, workers), device)
    with closing(batches.starting_at()) as found:
        for batch in islice(found, count):
            yield batch.images


def processor_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(make, args, device):
    """(images a second, images a second of processor time); the first batches, until all run, do not count."""
    warm = PREFETCH * max(1, args.workers)
    used = processor_seconds()
    batches = make(warm + args.batches)
    for _ in islice(batches, warm):
        pass
    start = time.perf_counter()
    delivered = sum(len(batch) for batch in batches)
    wait_for(device)
    elapsed = time.perf_counter() - start
    # The workers' own time is known when they have ended, and holds that of the first batches.
    del batches
    return delivered / elapsed, args.batch_size * (warm + args.batches) / (processor_seconds() - used)


def compare(name, folder, size, args, device):
    common = (folder, size, args.batch_size)
    loaders = {"torchvision": lambda count: torchvision_batches(*common, count, args.workers, device)}
    loaders["stop-mim, CPU"] = lambda count: our_batches(*common, count, args.workers, device, "cpu")
    if device.type == "cuda":
        loaders["stop-mim, GPU"] = lambda count: our_batches(*common, count, args.workers, device, "gpu")
    rates = {loader: [] for loader in loaders}
    for number in range(args.rounds + 1):
        for loader, make in loaders.items():
            measured = measure(make, args, device)
            # The first round fills caches and starts libraries.
            if number:
                rates[loader].append(measured)
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    print(f"\n{name}: {len(files)} files of {np.mean(files) / 1000:.1f} kB to {size}x{size}, {args.workers} workers")
    print(f"{'':14} {'images/s':>9} {'ratio':>6}  {'a core':>7} {'ratio':>6}")
    medians = {loader: [statistics.median(column) for column in zip(*rates[loader], strict=True)] for loader in loaders}
    wall, core = medians["torchvision"]
    for loader, (by_clock, by_core) in medians.items():
        print(f"{loader:14} {by_clock:9.0f} {by_clock / wall:5.2f}x  {by_core:7.0f} {by_core / core:5.2f}x", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder of folders of JPEGs; made for the purpose if not given")
    parser.add_argument("--size", type=int, default=224, help="of the crops of --folder")
    parser.add_argument("--from-data", help="fill made folders with the images of this dataset, resized")
    parser.add_argument("--case", choices=CASES, help="only this of the two made folders")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=20, help="measured in each round, after the first ones")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.folder is not None and not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    device = choose_device("auto")
    print(f"{os.cpu_count()} cores, {device}, torch {torch.__version__}")
    if args.folder is not None:
        compare(args.folder.name, args.folder, args.size, args, device)
        return
    for name in [args.case] if args.case else CASES:
        (height, width), size, quality, count = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), args.from_data, count, height, width, quality)
            compare(name, Path(folder), size, args, device)


if __name__ == "__main__":
    main()
