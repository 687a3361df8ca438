"""Decode steps captured in CUDA graphs, and the tensors that such graphs are bound to.

A decode step of a small batch takes a GPU less time than Python needs to launch its thousand kernels. A CUDA graph
launches them all at once. It reads and writes the same addresses at each replay: so the cache, the state of the slots
and the outputs are allocated once per model (`SlotMemory`) and serve one call of the sampler after the other. Weights
may change in place. When a step would read other tensors (weights that moved, other adapters, copies in half precision
or none) the graphs are captured again; in another precision the memory is allocated again, too.

What a step computes is in `generation.slot_step`. Not captured: weights that are gathered for each rollout (ZeRO 3),
models whose forward pass reads from the device or cannot be captured, and steps on a CPU.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from alpaca_ppo.generation.sampling_params import SamplingParams
from alpaca_ppo.generation.slot_cache import SlotCache
from alpaca_ppo.generation.slot_step import SlotOutputs, SlotState, StepRules, decode_step

Step = Callable[[], None]
"""A decode step, which changes the tensors of a `SlotMemory`."""

Capture = Callable[[Step], Step]
"""Returns a step that does what its argument does with the same tensors, without running it."""

_WARM_UP = 2
"""Steps before a capture, in which libraries allocate their workspaces and choose their kernels."""

_COMPILED_SHAPES = 1024
"""The most numbers of slots and columns, over all models of the process, for which a step is compiled."""

_KEPT_SETTINGS = 4
"""Settings of the sampler, such as temperatures, whose outputs and captured steps a memory keeps: the latest ones."""

_UNUSED_CACHE = 1.5
"""The most that a kept cache may exceed what its largest call needs, as a factor."""

_kept: WeakKeyDictionary[PreTrainedModel, "SlotMemory"] = WeakKeyDictionary()
_unfit: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose steps have turned out not to be capturable."""


class Precision(NamedTuple):
    """What the dtypes of keys, values and log-probs follow from."""

    device: torch.device
    weights: frozenset[torch.dtype]
    """Of the parameters."""
    autocast: torch.dtype | None
    """None outside autocast."""


def precision_of(model: PreTrainedModel) -> Precision:
    """Where and in which dtypes `model` computes now."""
    return Precision(model.device, frozenset(p.dtype for p in model.parameters()), _autocast_dtype(model.device))


class SlotMemory:
    """The cache, state and outputs of S slots, and the decode steps that were captured with them.

    Nothing here refers to the model, so that a memory that is kept for a model does not keep the model.

    Args:
        slots: S.
        extra_slots: rows of the cache beyond S that take no part in steps.
        columns: C, of the cache.
        precision: see `precision_of`; its device is that of all tensors.
        new_capture: returns how steps are captured, for steps that are dropped together; None runs them as they are.
    """

    def __init__(
        self,
        slots: int,
        extra_slots: int,
        columns: int,
        *,
        precision: Precision,
        new_capture: Callable[[], Capture] | None,
    ) -> None:
        self.sizes, self.precision = (slots, extra_slots, columns), precision
        self._device = device = precision.device
        self.cache = SlotCache(slots + extra_slots, columns)
        self.state = SlotState.idle(slots, scratch_row=0, device=device)
        self.outputs: SlotOutputs
        self.rules: StepRules
        self.in_use = False
        self.new_capture = new_capture
        self._key: SamplingParams
        self._buffers: dict[SamplingParams, tuple[SlotOutputs, StepRules]] = {}
        """In the order of their latest calls."""
        self._steps: dict[tuple[SamplingParams, int, int, int], Step] = {}
        self._capture: Capture
        self._binding: Any = None
        self._is_bound = False
        self._running_copy = torch.empty(slots, dtype=torch.bool, pin_memory=device.type == "cuda")
        self._copied: torch.cuda.Event | None = None

    def begin(self, params: SamplingParams, *, rows: int) -> None:
        """Makes all slots idle and the outputs empty, with at least `rows` rows."""
        # What varies between the rollouts of a run reaches a step through the keys of the random numbers.
        self._key = dataclasses.replace(params, seed=0, step=0, num_return_sequences=1)
        buffers = self._buffers.pop(self._key, None)
        if buffers is None or buffers[0].scratch_row < rows:
            buffers = None
            self._drop_steps(self._key)
            dtype = torch.float64 if torch.float64 in self.precision.weights else torch.float32
            outputs = SlotOutputs.empty(rows, params, logprob_dtype=dtype, device=self._device)
            buffers = outputs, StepRules(self._key, self._device)
        self._buffers[self._key] = self.outputs, self.rules = buffers
        while len(self._buffers) > _KEPT_SETTINGS:
            # The first key is that of the least recent call.
            oldest = next(iter(self._buffers))
            del self._buffers[oldest]
            self._drop_steps(oldest)
        self.outputs.clear(params.pad_token_id)
        self.state.clear(scratch_row=self.outputs.scratch_row)
        self.cache.clear()
        self._copied, self._is_bound = None, False

    def _drop_steps(self, key: SamplingParams) -> None:
        self._steps = {step_key: step for step_key, step in self._steps.items() if step_key[0] != key}

    def step(self, model: PreTrainedModel, *, slots: int, columns: int) -> None:
        """Makes a decode step of the first `slots` slots over the first `columns` columns; see `decode_step`."""
        # Bound to the tensors of now, as a graph is to their addresses.
        tensors = (self.cache, self.state, self.outputs, self.rules)
        eager = partial(decode_step, model, *tensors, slots=slots, columns=columns)
        run: Step = partial(_compiled(), *eager.args, **eager.keywords) if self._key.compile_decoding else eager
        if self.new_capture is not None:
            self._drop_outdated(model)
        if self.new_capture is not None and not self._steps:
            # The memory that graphs share is gone with the last of them.
            self._capture = self.new_capture()
            problem = self._without_rows(partial(host_read, eager))
            if problem is not None:
                self._give_up(model, f"it reads from the device: {problem}")
        # `reserve` moves the cache.
        key = (self._key, slots, columns, self.cache.columns)
        if self.new_capture is not None and key not in self._steps:
            try:
                with _uncached_autocast(self._device):
                    self._steps[key] = self._without_rows(partial(self._capture, run))
            except RuntimeError as error:
                # A capture that an error has interrupted ends with an error of its own.
                cause = error.__context__ or error
                if isinstance(cause, torch.OutOfMemoryError):
                    self._do_without(model)
                else:
                    self._give_up(model, str(cause).partition("\n")[0])
        self._steps.get(key, run)()

    def _drop_outdated(self, model: PreTrainedModel) -> None:
        """Drops captured steps, at the first step of a call, if they would read other weights than those of `model`."""
        if self._is_bound:
            return
        # Passes over prompts come before the first step, and copies of weights are made at their first use.
        binding, self._is_bound = weights_binding(model), True
        if binding != self._binding:
            self._steps.clear()
            self._binding = binding

    def _give_up(self, model: PreTrainedModel, reason: str) -> None:
        """Runs all steps of `model` as they are from now on."""
        self._drop_captures(model)
        _unfit.add(model)
        warnings.warn(
            f"the decode steps of {type(model).__name__} cannot be captured in CUDA graphs ({reason}); they run as "
            f"with cuda_graphs: false",
            stacklevel=3,
        )

    def _do_without(self, model: PreTrainedModel) -> None:
        """Runs the other steps of this call as they are: a capture needs memory that its step alone may not."""
        self._drop_captures(model)
        warnings.warn(
            f"the device ran out of memory while a decode step of {type(model).__name__} was captured in a CUDA graph; "
            f"the other steps of this call run as with cuda_graphs: false, and the next call captures again. Lower "
            f"rollout_per_device_batch_size (slots), or set cuda_graphs: false",
            stacklevel=3,
        )

    def _drop_captures(self, model: PreTrainedModel) -> None:
        self.new_capture = None
        self._steps.clear()
        _kept.pop(model, None)

    def _without_rows(self, call: Callable[[], Any]) -> Any:
        """Returns `call()`, during which no row runs, so that steps in it record nothing and advance no row."""
        running = self.state.running.clone()
        self.state.running.zero_()
        try:
            return call()
        finally:
            self.state.running.copy_(running)

    def request_running(self) -> None:
        """Starts to copy to the host which rows run, so that `running` need not wait for the steps that follow."""
        if self._device.type == "cuda":
            self._running_copy.copy_(self.state.running, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def running(self) -> list[bool]:
        """Returns which slots run: as of `request_running` if that was called since the last call on CUDA, else now."""
        if self._copied is None:
            return [bool(running) for running in self.state.running.tolist()]
        self._copied.synchronize()
        self._copied = None
        return [bool(running) for running in self._running_copy.tolist()]


@contextmanager
def slot_memory(
    model: PreTrainedModel, params: SamplingParams, *, slots: int, columns: int, extra_slots: int, rows: int
) -> Iterator[SlotMemory]:
    """Yields a memory with at least as many slots, columns and rows of outputs.

    Where steps are captured, it is kept for the next call with this model, its memory on the device included. A call
    inside the block gets one of its own.

    Args:
        model: the language model.
        params: how tokens are chosen.
        slots: rows that are decoded at once.
        columns: of the cache.
        extra_slots: rows of the cache beyond these that take no part in steps.
        rows: responses of the call.
    """
    if not captures(model, params) or (model in _kept and _kept[model].in_use):
        memory = SlotMemory(slots, extra_slots, columns, precision=precision_of(model), new_capture=None)
    else:
        memory = _kept_memory(model, (slots, extra_slots, columns))
    memory.in_use = True
    try:
        memory.begin(params, rows=rows)
        yield memory
    except BaseException:
        # It may have been its size that did not fit into the device's memory.
        if _kept.get(model) is memory:
            del _kept[model]
        raise
    finally:
        memory.in_use = False


def _kept_memory(model: PreTrainedModel, sizes: tuple[int, int, int]) -> SlotMemory:
    """The memory that is kept for `model`, which is replaced if it is too small or of another precision.

    A replacement is large enough for the call before too, unless one of them is wide and the other long.
    """
    precision, kept = precision_of(model), _kept.get(model)
    if kept is not None and kept.precision == precision:
        slots, extra_slots, columns = map(max, sizes, kept.sizes)
        both = (slots, extra_slots, columns)
        if both == kept.sizes:
            return kept
        if _cells(both) <= _UNUSED_CACHE * max(_cells(sizes), _cells(kept.sizes)):
            sizes = both
    # Freed first: two of them may not fit into the device's memory.
    kept = None
    _kept.pop(model, None)
    memory = _kept[model] = SlotMemory(*sizes, precision=precision, new_capture=CudaCapture)
    return memory


def _cells(sizes: tuple[int, int, int]) -> int:
    """The tokens for which a cache with slots, extra slots and columns of these numbers has room."""
    slots, extra_slots, columns = sizes
    return (slots + extra_slots) * columns


def captures(model: PreTrainedModel, params: SamplingParams) -> bool:
    """Whether decode steps of `model` are to be captured in CUDA graphs."""
    if not params.cuda_graphs or not _on_cuda(model) or model in _unfit:
        return False
    # DeepSpeed marks the parameters that ZeRO 3 shards by this attribute. They are gathered at new addresses.
    return not any("ds_id" in vars(parameter) for parameter in model.parameters())


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """A block in which `device` is torch's current one; streams and events without a device of their own are its."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _on_cuda(model: PreTrainedModel) -> bool:
    return model.device.type == "cuda"


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps a workspace for each stream that it has ever worked on."""
    return torch.cuda.Stream(device)


_capturing = RLock()
"""Held during a capture: what another thread launches on the same stream would become part of the graph."""


class CudaCapture:
    """Captures steps in CUDA graphs that share their memory, which they may since no two of them run at a time.

    Once all of its graphs are gone it must not capture another one: torch refuses a pool that no graph uses any more.
    It captures on torch's current device.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(torch.cuda.current_device())

    def __call__(self, run: Step) -> Step:
        """Returns a step that replays what `run` does; `run` is called before the capture to warm up."""
        with _capturing:
            return self._capture(run)

    def _capture(self, run: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UP):
                    run()
        finally:
            # After an error, too, steps that run as they are come after those of the warm-up.
            torch.cuda.current_stream().wait_stream(self._stream)
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Other threads, such as those of reward functions, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        finally:
            # Where a capture fails, `torch.cuda.graph` leaves its own stream as the current one.
            torch.cuda.set_stream(current)
        return graph.replay


def weights_binding(model: PreTrainedModel) -> Any:
    """Returns what a captured step of `model` depends on beyond the contents of its weights, for comparison.

    That is where the weights and the copies in half precision are that it reads now, which adapters act, and the
    precision of autocast.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return (
        [(tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers())],
        [
            (layer.disable_adapters, list(layer.active_adapters), list(layer.merged_adapters), dict(layer.scaling))
            for layer in layers
        ],
        _autocast_dtype(model.device),
        model.config._attn_implementation,
    )


class _HostReads(TorchDispatchMode):
    """Notes the first operator that needs the contents of a tensor on the host, or whose result's shape does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.found is None and _reads(func, args, result):
            self.found = str(func)
        return result


def _reads(func: Any, args: Any, result: Any) -> bool:
    aten = torch.ops.aten
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        # The result of a mask has as many entries as the mask has Trues.
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        return True
    # A kernel takes a number that is a CPU tensor along; a copy between devices has to wait.
    copies = func in (aten._to_copy.default, aten.copy_.default)
    tensors = [tensor for tensor in (*args, result) if isinstance(tensor, Tensor) and (copies or tensor.dim() > 0)]
    return len({tensor.device for tensor in tensors}) > 1


def host_read(run: Step) -> str | None:
    """Returns the first operator of `run()` that waits for the device, None if there is none."""
    with _HostReads() as mode:
        run()
    return mode.found


@cache
def _compiled(backend: str | Callable[..., Any] = "inductor") -> Callable[..., None]:
    """`decode_step` through `torch.compile`, for each number of slots and columns as one graph."""
    compiled = torch.compile(decode_step, fullgraph=True, dynamic=False, backend=backend)

    def step(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        # Slots halve and columns come in steps, so there are more shapes than the eight that torch allows a function.
        with torch._dynamo.config.patch(recompile_limit=_COMPILED_SHAPES, accumulated_recompile_limit=_COMPILED_SHAPES):
            try:
                compiled(model, *args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = str(error).strip().partition("\n")[0]
                raise ValueError(
                    f"compile_decoding (True): the decode step of {type(model).__name__} cannot be compiled as one "
                    f"graph ({type(error).__name__}: {reason}); set compile_decoding: false"
                ) from error

    return step


def _uncached_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast as it is, without its cache: a graph would go on reading copies of weights that are long outdated."""
    dtype = _autocast_dtype(device)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
