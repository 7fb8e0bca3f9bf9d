"""The process group in Python: torch.distributed's collectives over the C engine, by ctypes, with Future-backed Work.

It serves where nothing can be compiled. What it knows of tensors ends at addresses and sizes: outputs that are not dense
get a dense stand-in that is copied back.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.comm.engine import CollectiveError, SharedMemory
from stoker.comm.fitting import expect_fit, expect_list, expect_type
from stoker.comm.lane import Lane, Named
from stoker.comm.paths import Paths
from stoker.comm.process_group import open_channel
from stoker.comm.tensors import Dense, copy_to, numbers, op_code, op_name, parts, pointers, sizes, type_code

__all__ = ["PythonGroup"]

_WIRE_PIECE = 8 << 20  # bytes that go between hosts at a time, while the next are reduced within the host


_c10d: Any = torch._C._distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs know other signatures than torch itself


class PythonGroup(_ProcessGroup):  # type: ignore[misc]
    """A c10d process group over the paths of this rank."""

    def __init__(self, paths: Paths) -> None:
        super().__init__(paths.rank, paths.size)
        self.paths = paths
        self._group_name = self._group_desc = ""
        self._timeout = self._now_timeout = paths.timeout
        self._wire = paths.wire
        self._lane = Lane("ccl")
        self._after = Lane("ccl")
        """What follows operations of gloo."""
        self._channels: dict[tuple[int, int, int], tuple[Lane, list[SharedMemory]]] = {}
        self._opening = threading.Lock()
        self._closed = self._aborted = False
        self._process = os.getpid()

    # --- what c10d asks of every process group

    def name(self) -> str:
        return "ccl"

    def getBackendName(self) -> str:
        return "ccl"

    def get_group_store(self) -> dist.Store:
        return self.paths.store

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        self._closed = True
        if os.getpid() != self._process:  # in a child of fork(): threads, segments and wire are its parent's
            return
        with self._opening:
            channels = dict(self._channels)
        # What was sent is delivered; what is still to be received has nobody left to receive it.
        self._abort_channels("destroyed", sends=False)
        for lane, channel in channels.values():
            # A segment that someone is still reading stays; the process's end frees it.
            if lane.close():
                for memory in channel:
                    memory.close()
        self._channels.clear()
        if all([self._lane.close(), self._after.close()]):
            self.paths.close()
        if self._wire is not None:
            self._wire.leave()
            self._wire = None

    def abort(self) -> None:
        if os.getpid() == self._process:
            self._wire = None
            self._closed = self._aborted = True
            if self.paths.local is not None:
                self.paths.local.abort(f"rank {self.paths.names[self.paths.rank]} aborted the group")
            self._abort_channels("aborted", sends=True)
        self.shutdown()

    def _abort_channels(self, done: str, *, sends: bool) -> None:
        with self._opening:
            channels = dict(self._channels)
        for (_, to, _), (lane, channel) in channels.items():
            if (sends or to == self.rank()) and lane.unfinished:
                for memory in channel:
                    memory.abort(f"rank {self.paths.names[self.paths.rank]} {done} the group")

    # --- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        op = op_name(opts.reduceOp)
        if self._on_gloo(hierarchical=True):
            return self._named(self.paths.flat.allreduce(tensors, opts))
        dense = [Dense(tensor) for tensor in tensors]
        if self.paths.hierarchical and op == "AVG":  # the leaders alone divide: all refuse what they cannot divide
            for tensor in tensors:
                _expect_mean(tensor)

        def run() -> None:
            for item in dense:
                if self.paths.hierarchical:
                    self._allreduce_or_explain(item.flat, op)
                else:
                    self._local("allreduce", item.address, item.count, type_code(item.flat), op_code(op), -1)
                item.back()

        return self._start(run, tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._on_gloo(hierarchical=False):
            return self._named(self.paths.flat.broadcast(tensors, opts))
        item = Dense(tensors[0])

        def run() -> None:
            self._local("broadcast", item.address, item.bytes, opts.rootRank)
            item.back()

        return self._start(run, tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or dist.ReduceOptions()
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if self._on_gloo():
            return self._averaged(opts, tensors[0], tensors, lambda: self.paths.flat.reduce(tensors, opts))
        item, op = Dense(tensors[0]), op_name(opts.reduceOp)
        added = numbers(item.flat, op)

        def run() -> None:
            self._local("allreduce", item.address, added.numel(), type_code(added), op_code(op), opts.rootRank)
            item.back()

        return self._start(run, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or _c10d.AllgatherOptions()
        expect_list("all_gather", outputs[0], self.size())
        if self._on_gloo() and len({tensor.shape for tensor in outputs[0]}) > 1:
            return self._gather_uneven(outputs, inputs[0], opts)
        if self._on_gloo():
            return self._named(self.paths.flat.allgather(outputs, inputs, opts))
        expect_type("all_gather", inputs[0], outputs[0])
        expect_fit("all_gather, to itself", inputs[0], outputs[0][self.rank()])
        source, targets = Dense(inputs[0]), [Dense(tensor) for tensor in outputs[0]]

        def run() -> None:
            lengths = sizes(target.bytes for target in targets)
            self._local("allgather", source.address, pointers(t.address for t in targets), lengths)
            for target in targets:
                target.back()

        return self._start(run, outputs, opts)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        opts = opts or _c10d.AllgatherOptions()
        if self._on_gloo():
            return self._named(self.paths.flat._allgather_base(output, source, opts))
        expect_fit("all_gather_into_tensor", source, output, gathered=self.size())
        return self.allgather([parts(output, self.size())], [source.reshape(-1)], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        expect_list("all_gather_coalesced", outputs, self.size())
        for tensors in outputs:
            expect_list("all_gather_coalesced, outputs of a rank", tensors, len(inputs))
        by_input = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self._last(self.allgather([list(found)], [source], opts) for found, source in by_input)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._last(self._allgather_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if self._on_gloo():
            flat = self.paths.flat
            return self._averaged(opts, outputs[0], outputs, lambda: flat.reduce_scatter(outputs, inputs, opts))
        expect_list("reduce_scatter", inputs[0], self.size())
        expect_type("reduce_scatter", outputs[0], inputs[0])
        expect_fit("reduce_scatter", inputs[0][self.rank()], outputs[0])
        target, sources, op = Dense(outputs[0]), [Dense(tensor) for tensor in inputs[0]], op_name(opts.reduceOp)

        def run() -> None:
            counts = sizes(numbers(source.flat, op).numel() for source in sources)
            addresses = pointers(source.address for source in sources)
            kind = type_code(numbers(target.flat, op))
            self._local("reduce_scatter", addresses, target.address, counts, kind, op_code(op))
            target.back()

        return self._start(run, outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if self._on_gloo():
            flat = self.paths.flat
            return self._averaged(opts, output, [output], lambda: flat._reduce_scatter_base(output, source, opts))
        expect_fit("reduce_scatter_tensor", source, output, scattered=self.size())
        return self.reduce_scatter([output.view(-1)], [parts(source, self.size())], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._last(self._reduce_scatter_base(o, i, opts) for o, i in zip(outputs, inputs, strict=True))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        for tensors in (inputs, outputs):
            expect_list("all_to_all", tensors, self.size())
            expect_type("all_to_all", inputs[0], tensors)
        expect_fit("all_to_all, to itself", inputs[self.rank()], outputs[self.rank()])
        if self._on_gloo():
            return self._exchange_lists(outputs, inputs, opts)
        sources, targets = [Dense(tensor) for tensor in inputs], [Dense(tensor) for tensor in outputs]

        def run() -> None:
            self._local(
                "alltoall",
                pointers(source.address for source in sources),
                sizes(source.bytes for source in sources),
                pointers(target.address for target in targets),
                sizes(target.bytes for target in targets),
            )
            for target in targets:
                target.back()

        return self._start(run, outputs, opts)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        if self._on_gloo():
            return self._named(
                self.paths.flat.alltoall_base(
                    output, source, output_splits, input_splits, opts or dist.AllToAllOptions()
                )
            )
        return self.alltoall(self._split(output, output_splits), self._split(source, input_splits), opts)

    def _split(self, tensor: Tensor, splits: Any) -> list[Tensor]:
        rows, ranks = tensor.shape[0], self.size()
        if not splits and rows % ranks:
            raise ValueError(f"alltoall: {rows} rows cannot be divided among {ranks} ranks; give the splits")
        return list(tensor.split(list(splits) or [rows // ranks] * ranks))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.GatherOptions()
        if self._on_gloo():
            return self._named(self.paths.flat.gather(outputs, inputs, opts))
        if opts.rootRank == self.rank():
            expect_list("gather", outputs[0], self.size())
            for tensor in outputs[0]:
                expect_fit("gather", inputs[0], tensor)
        source = Dense(inputs[0])
        targets = [Dense(tensor) for tensor in outputs[0]] if opts.rootRank == self.rank() else []

        def run() -> None:
            to = pointers(target.address for target in targets)
            self._local("gather", source.address, to, source.bytes, opts.rootRank)
            for target in targets:
                target.back()

        return self._start(run, outputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.ScatterOptions()
        if self._on_gloo():
            return self._named(self.paths.flat.scatter(outputs, inputs, opts))
        if opts.rootRank == self.rank():
            expect_list("scatter", inputs[0], self.size())
            for tensor in inputs[0]:
                expect_fit("scatter", tensor, outputs[0])
        target = Dense(outputs[0])
        sources = [Dense(tensor) for tensor in inputs[0]] if opts.rootRank == self.rank() else []

        def run() -> None:
            where = pointers(source.address for source in sources)
            self._local("scatter", where, target.address, target.bytes, opts.rootRank)
            target.back()

        return self._start(run, outputs, opts)

    def barrier(self, opts: Any = None) -> Any:
        opts = opts or dist.BarrierOptions()
        if self._on_gloo():
            return self._named(self.paths.flat.barrier(opts))
        return self._start(lambda: self._local("barrier"), [], opts)

    # torch 2.13 calls some collectives by newer names
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # --- point to point: a channel of two ranks per direction and tag, so that no message waits behind another

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        self._check_rank(to)
        if to not in self.paths.here or self.paths.local is None:
            return self._named(self.paths.flat.send(tensors, to, tag))
        return self._message(self.rank(), to, tag, tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        self._check_rank(source)
        if source not in self.paths.here or self.paths.local is None:
            return self._named(self.paths.flat.recv(tensors, source, tag))
        return self._message(source, self.rank(), tag, tensors)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        raise RuntimeError("ccl receives from a rank that is named; give recv its src")

    def _check_rank(self, rank: int) -> None:
        if self._closed:
            raise RuntimeError("this ccl group has been destroyed")
        if not 0 <= rank < self.size():
            raise ValueError(f"there is no rank {rank} in a group of {self.size()}")

    def _message(self, source: int, to: int, tag: int, tensors: list[Tensor]) -> Any:
        item = Dense(tensors[0])
        with self._opening:
            self._check_rank(to)  # under the lock: shutdown sees every channel that is made before
            key = (source, to, tag)
            lane, channel = self._channels.setdefault(key, (Lane(f"ccl-{source}-{to}"), []))

        def wanted() -> bool:
            return not (self._aborted or (self._closed and to == self.rank()))

        def run() -> None:
            if not channel:
                channel.append(open_channel(self.paths, source, to, tag, wanted))
            # Whoever closes the group says so first and looks for channels to abort then: one of the two sees the other.
            if not wanted():
                raise CollectiveError("this ccl group has been destroyed")
            channel[0].set_timeout(self._timeout)
            try:
                channel[0].call("broadcast", item.address, item.bytes, 0)
            except CollectiveError as error:  # a broadcast between two; its errors speak of what was asked for
                said = str(error).replace("broadcast of ", "message of ").replace(" with root ", " from ")
                raise CollectiveError(said) from None
            if to == self.rank():
                item.back()

        return lane.submit(run, tensors)

    # --- between hosts

    def _named(self, work: Any) -> Any:
        assert self.paths.roll_call is not None
        return Named(work, self.paths.roll_call)

    # What gloo has no words for: its own operation begins at once, so that all ranks begin theirs in the same order, and what is
    # done in `after` makes of it what was asked for.

    def _then(self, work: Any, result: Any, opts: Any, after: Callable[[], None]) -> Any:
        named = self._named(work)

        def run() -> None:
            named.wait()
            after()

        return self._after.submit(run, result, inline=not opts.asyncOp)

    def _averaged(self, opts: Any, target: Tensor, result: Any, begin: Callable[[], Any]) -> Any:
        """gloo has no mean."""
        if op_name(opts.reduceOp) != "AVG":
            return self._named(begin())
        _expect_mean(target)
        opts.reduceOp = dist.ReduceOp.SUM

        def divide() -> None:
            target.div_(self.size())

        return self._then(begin(), result, opts, divide)

    def _gather_uneven(self, outputs: Any, source: Tensor, opts: Any) -> Any:
        """Everyone sends as much as the one who has most."""
        most = max(source.numel(), *(tensor.numel() for tensor in outputs[0]))
        sent = source.new_zeros(most)
        sent[: source.numel()] = source.detach().reshape(-1)
        got = [torch.empty_like(sent) for _ in outputs[0]]
        work = self.paths.flat.allgather([got], [sent], opts)
        return self._then(work, outputs, opts, lambda: copy_to(outputs[0], got))

    def _exchange_lists(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        sent, received = [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs]
        source = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        target = source.new_empty(sum(received))
        work = self.paths.flat.alltoall_base(target, source, received, sent, opts)
        return self._then(work, outputs, opts, lambda: copy_to(outputs, target.split(received)))

    def _allreduce_or_explain(self, tensor: Tensor, op: str) -> None:
        try:
            self._hierarchical_allreduce(tensor, op)
        except RuntimeError as error:
            assert self.paths.roll_call is not None
            raise CollectiveError(self.paths.roll_call(str(error))) from error

    def _hierarchical_allreduce(self, tensor: Tensor, op: str) -> None:
        """Reduce within the host, between the leaders, and hand out; a piece is on the wire while the next is reduced."""
        local = self.paths.local
        assert local is not None
        inner = "SUM" if op == "AVG" else op
        each = max(1, _WIRE_PIECE // tensor.element_size())
        pieces = list(tensor.split(each)) if tensor.numel() else [tensor]
        flying: list[tuple[Tensor, Callable[[], Any]]] = []

        def or_tell_the_others(step: Callable[[], Any]) -> Any:
            """The other ranks of this host wait for its leader."""
            try:
                return step()
            except Exception as error:
                trouble = f"the way to another host failed (to {self.paths.beyond}): {error}"
                local.abort(trouble)
                raise CollectiveError(f"ccl: {trouble}") from error

        def hand_out() -> None:
            piece, landing = flying.pop(0)
            or_tell_the_others(landing)
            if op == "AVG" and self.paths.leaders is not None:
                piece /= self.size()
            local.call("broadcast", piece.data_ptr(), piece.numel() * piece.element_size(), 0)

        for piece in pieces:
            local.call("allreduce", piece.data_ptr(), piece.numel(), type_code(piece), op_code(inner), 0)
            flying.append((piece, or_tell_the_others(functools.partial(self._take_off, piece, inner))))
            if len(flying) > 1:
                hand_out()
        while flying:
            hand_out()

    def _take_off(self, piece: Tensor, op: str) -> Callable[[], Any]:
        """Starts a piece on its way between the leaders; what it returns waits for it. Nothing on ranks that do not lead."""
        if self.paths.leaders is None:
            return lambda: None
        if piece.dtype == torch.bool:  # truth values travel as bytes: any is their maximum, all their minimum
            piece = piece.view(torch.uint8)
            op = op if op == "BXOR" else "MIN" if op in {"PRODUCT", "MIN", "BAND"} else "MAX"
        timeout, wire = self._now_timeout, self._wire
        if wire is not None and wire.carries(piece, op):
            request = wire.start(piece, op)

            def land() -> None:
                try:
                    wire.wait(request, timeout)
                except RuntimeError:
                    self._wire = None  # forgotten, not left: leaving would wait for the other hosts
                    raise

            return land
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        options.timeout = timeout
        work = self.paths.leaders.allreduce([piece], options)
        return lambda: work.wait()

    # --- small things

    def _on_gloo(self, *, hierarchical: bool = False) -> bool:
        return not (self.paths.one_host or (hierarchical and self.paths.hierarchical))

    def _local(self, name: str, *arguments: Any) -> None:
        assert self.paths.local is not None
        self.paths.local.call(name, *arguments)

    def _start(self, run: Callable[[], None], result: Any, opts: Any) -> Any:
        asked = opts.timeout
        timeout = asked if isinstance(asked, timedelta) and asked > timedelta(0) else self._timeout

        def timed() -> None:
            assert self.paths.local is not None
            self.paths.local.set_timeout(timeout)
            self._now_timeout = timeout
            run()

        return self._lane.submit(timed, result, inline=not opts.asyncOp)

    @staticmethod
    def _last(works: Any) -> Any:
        return list(works)[-1]  # a lane keeps the order: when the last is done, all are


def _expect_mean(tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"avg of {tensor.dtype} is not defined")
