"""Loads the synopsis that a catalogue lists; what is loaded once serves later batches, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from roost.storage.files import Files
from roost.synopsis.ageing import Band, add
from roost.synopsis.bands import Bands, Sketch
from roost.synopsis.bins import learn_bins
from roost.synopsis.catalogue import Catalogue, FileKind, PartName, open_part, read_rows
from roost.synopsis.scope import Scope
from roost.synopsis.sets import SetSketches
from roost.synopsis.spec import SynopsisSpec
from roost.synopsis.synopsis import Synopsis, build

LOADED = 16  # sets of files that queries of the newest batch have read


class Loader:
    """Opens the files that queries need, and merges those that are not folded yet.

    The caller makes sure that no file is deleted meanwhile.
    """

    def __init__(self, files: Files, spec: SynopsisSpec) -> None:
        self._files = files
        self._spec = spec
        self._catalogue: Catalogue | None = None
        self._bases: dict[PartName, Synopsis] = {}
        self._pending: tuple[frozenset[str], list[Band]] = frozenset(), []  # deltas, merged
        self._pending_sets: list[SetSketches] = []
        self._loaded: OrderedDict[tuple[PartName, ...], Sketch] = OrderedDict()

    def load(self, catalogue: Catalogue, scopes: Sequence[Scope]) -> Sketch:
        """Return the bases that the scopes need, with all that is not folded yet."""
        if catalogue is not self._catalogue:
            listed = {file.name for file in catalogue.files}
            self._bases = {part: s for part, s in self._bases.items() if part[0] in listed}
            self._loaded.clear()
            self._catalogue = catalogue
        needed = catalogue.needed(scopes, self._spec)
        if needed not in self._loaded:
            self._loaded[needed] = self._open(catalogue, needed)
            while len(self._loaded) > LOADED:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(needed)
        return self._loaded[needed]

    def _open(self, catalogue: Catalogue, needed: Sequence[PartName]) -> Sketch:
        bins, bases = catalogue.bins, {file.name for file in catalogue.of_kind(FileKind.BASE)}
        if bins is None or not needed:
            return self._build(catalogue)
        opened = []
        for part in needed:
            if part[0] in bases:
                if part not in self._bases:
                    self._bases[part] = open_part(self._files, part)
                opened.append(self._bases[part])
        sets = [own for part in opened for own in part.set_sketches]
        # Set sketches of bases are parts of their own, without rows.
        parts = [part for part in opened if not part.spec.sets]
        if len(opened) < len(needed):
            parts += [band.synopsis for band in self._merge_deltas(catalogue)]
            sets += self._pending_sets
        if not parts:
            parts = [self._build(catalogue).without_sets()]
        return parts[0] if len(parts) == 1 and not sets else Bands(tuple(parts), tuple(sets))

    def _build(self, catalogue: Catalogue) -> Synopsis:
        """Build from the rows at full resolution, if there are any."""
        names = [file.name for file in catalogue.of_kind(FileKind.ROWS)]
        rows = read_rows(self._files, names, self._spec)
        return build(rows, self._spec, catalogue.bins or learn_bins(rows, self._spec))

    def _merge_deltas(self, catalogue: Catalogue) -> list[Band]:
        """Merge the deltas with those of the batches before."""
        deltas = {file.name: file for file in catalogue.of_kind(FileKind.DELTA)}
        known, bands = self._pending
        if not known <= deltas.keys():
            known, bands, self._pending_sets = frozenset(), [], []
        for name in deltas.keys() - known:
            for number in range(len(deltas[name].parts)):
                part = open_part(self._files, (name, number))
                self._pending_sets += part.set_sketches
                bands = add(bands, Band(0, part.without_sets()))
        self._pending = frozenset(deltas), bands
        return bands
