"""`DeviceTensor`: a tensor that says `cuda:0` and keeps its numbers on the CPU; `DeviceMode` makes them.

The rules, for each operator that torch would run on the device:

- An operator without a kernel of its own is decomposed; views are made at once; writes are queued. New memory gets its
  form from meta tensors, and is poison until its call has run.
- A copy from page-locked memory that says `non_blocking` reads it when it runs. Any other upload is a wait, as are
  downloads to pageable memory, and operators with a result that the host or a shape depends on.
- A tensor of the host is refused, but for numbers without dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from .memory import poison

if TYPE_CHECKING:
    from .mirror import Mirror

aten: Final = torch.ops.aten
CUDA: Final = torch.device("cuda:0")

_ANSWERS: Final = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
"""The host, or a shape, depends on the result."""
_INDEXED: Final = {aten.index.Tensor, aten.index_put_.default}
_EMPTY: Final = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class DeviceTensor(Tensor):
    """A tensor of the mirror.

    Attributes:
        host: the numbers, a CPU tensor of the same shape and strides; only queued calls may read or write it.
        mirror: its device.
    """

    host: Tensor
    mirror: Mirror
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor, mirror: Mirror) -> DeviceTensor:
        with torch.inference_mode(False):  # else its views could not be made
            made = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=CUDA,
            )
        made.host, made.mirror = host, mirror
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        mirror = next(each.mirror for each in leaves(args, kwargs or {}) if isinstance(each, DeviceTensor))
        return dispatch(mirror, func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def set_(self, storage: Any, *form: Any) -> DeviceTensor:
        return DeviceTensor(torch.empty(0, dtype=self.dtype).set_(storage, *form), self.mirror)

    def is_pinned(self, _device: Any = None) -> bool:
        return False

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        self.mirror.streams.synchronize("tolist")
        return self.host.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


class DeviceMode(TorchDispatchMode):
    """While it is on, tensors that are made for "cuda" are made on the mirror."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__()
        self._mirror = mirror

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(self._mirror, func, args, kwargs or {})


def leaves(args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of an operator, and the members of those that are lists. `tree_leaves` takes five times as long."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, (list, tuple)):
            yield from each
        else:
            yield each


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results of an operator with a function of each, as by `tree_map`."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([mapped(function, each) for each in value])
    if kind is dict:
        return {name: mapped(function, each) for name, each in value.items()}
    return tree_map(function, value) if isinstance(value, tuple) else function(value)


def host_of(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def dispatch(mirror: Mirror, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operator by the rules of this module."""
    tensors = [each for each in leaves(args, kwargs) if isinstance(each, Tensor)]
    on_device = any(isinstance(each, DeviceTensor) for each in tensors)
    device = kwargs.get("device")
    if not on_device and (device is None or torch.device(device).type != "cuda"):
        return _on_host(mirror, func, args, kwargs)
    if func is aten._to_copy.default or func is aten.copy_.default:
        mirror.operators.add(str(func))
        return _copy(mirror, func, args, kwargs)
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        with mirror.mode:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    mirror.operators.add(str(func))
    if on_device:
        _refuse_hosts(mirror, func, [each for each in tensors if not isinstance(each, DeviceTensor)])
    if why := _hidden_wait(mirror, func, args, kwargs):
        mirror.streams.wait(why)
    if func in _ANSWERS or (func in _INDEXED and _has_mask(args[1])):
        mirror.streams.synchronize(str(func))
        return _run_now(mirror, func, args, kwargs)
    schema = func._schema
    if any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments):
        return _write(mirror, func, args, kwargs)
    if any(each.alias_info is not None for each in schema.returns):  # a view
        return _run_now(mirror, func, args, kwargs)
    return _make(mirror, func, args, kwargs)


def _on_host(mirror: Mirror, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    form = func(*args, **{**kwargs, "pin_memory": False, "device": "meta"})
    made = mirror.host_memory.allocate(form.shape, form.dtype)
    if func not in _EMPTY:
        made.copy_(func(*args, **{**kwargs, "pin_memory": False}))
    return made


def _refuse_hosts(mirror: Mirror, func: Any, hosts: list[Tensor]) -> None:
    bad = [each for each in hosts if each.dim() > 0]
    if not bad:
        return
    mirror.faults.add("host tensor", f"{func} {[(tuple(each.shape), each.dtype) for each in bad]}")
    if func not in _INDEXED:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found cuda:0 and cpu")
    mirror.streams.wait(f"{func} uploads its indices")


def _hidden_wait(mirror: Mirror, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Why the operator's CUDA kernel reads something on the host, or ""."""
    if func is aten.segment_reduce.default and not kwargs.get("unsafe"):
        return "segment_reduce checks the lengths"
    if func is aten._grouped_mm.default and not _has_grouped_kernel(mirror, args[0]):
        return "grouped_mm multiplies group by group"
    return ""


def _has_grouped_kernel(mirror: Mirror, x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and mirror.capability[0] in (9, 10)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _run_now(mirror: Mirror, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    host_args, host_kwargs = _on_cpu(args, kwargs)
    with _disable_current_modes():
        result = func(*host_args, **host_kwargs)
    if func is aten.index_put_.default:
        return args[0]
    return mapped(lambda each: DeviceTensor(each, mirror) if isinstance(each, Tensor) else each, result)


def _on_cpu(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    host_args, host_kwargs = mapped(host_of, args), mapped(host_of, kwargs)
    if "device" in host_kwargs:
        host_kwargs["device"] = torch.device("cpu")
    if "pin_memory" in host_kwargs:
        host_kwargs["pin_memory"] = False
    return host_args, host_kwargs


def _write(mirror: Mirror, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """In place, or with `out`."""
    host_args, host_kwargs = _on_cpu(args, kwargs)
    arguments = func._schema.arguments
    given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    written = [each for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    results = []
    for made in func._schema.returns:
        assert made.alias_info is not None, f"{func} writes, and makes new memory"
        names = (each.name for each in written if each.alias_info.before_set & made.alias_info.before_set)
        results.append(given[next(names)])
    mirror.streams.current.put(lambda: func(*host_args, **host_kwargs))
    if len(results) > 1:
        return tuple(results)
    return results[0] if results else None


def _make(mirror: Mirror, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With new memory for the results."""
    forms = _forms(func, args, kwargs)
    made = mapped(lambda each: mirror.allocate_like(each) if isinstance(each, Tensor) else each, forms)
    host_args, host_kwargs = _on_cpu(args, kwargs)
    hosts = [each.host for each in leaves((made,), {}) if isinstance(each, DeviceTensor)]

    def run() -> None:
        result = func(*host_args, **host_kwargs)
        results = (
            [result] if isinstance(result, Tensor) else [each for each in result if isinstance(each, Tensor)]
        )
        for host, made_now in zip(hosts, results, strict=True):
            if host.shape != made_now.shape or host.dtype != made_now.dtype:
                mirror.faults.add(
                    "form", f"{func}: {host.shape} {host.dtype}, not {made_now.shape} {made_now.dtype}"
                )
            host.copy_(made_now)

    if func not in _EMPTY:
        mirror.streams.current.put(run)
    return made


_KNOWN_FORMS: dict[Any, Any] = {}


def _forms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results as meta tensors, which are only read: those of the same call before, if there was one."""
    key = func, _facts(list(args)), tuple((name, _facts(value)) for name, value in kwargs.items())
    try:
        if key not in _KNOWN_FORMS:
            _KNOWN_FORMS[key] = _computed_forms(func, args, kwargs)
    except TypeError:  # an argument has no hash
        return _computed_forms(func, args, kwargs)
    return _KNOWN_FORMS[key]


def _facts(value: Any) -> Any:
    """Facts about an argument that the form of a result depends on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if type(value) in (list, tuple):
        return tuple([_facts(each) for each in value])
    return type(value), value


def _computed_forms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func is aten._grouped_mm.default:  # its meta kernel knows bfloat16 only
        x, weights = args[:2]
        return torch.empty((x.shape[0], weights.shape[-1]), dtype=x.dtype, device="meta")
    meta_args, meta_kwargs = mapped(_meta, args), mapped(_meta, kwargs)
    if "device" in meta_kwargs:
        meta_kwargs["device"] = torch.device("meta")
    if "pin_memory" in meta_kwargs:
        meta_kwargs["pin_memory"] = False
    return func(*meta_args, **meta_kwargs)


def _meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = host_of(value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _copy(mirror: Mirror, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    names = (each.name for each in func._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    source: Tensor = given["src"] if func is aten.copy_.default else given["self"]
    target: Tensor = given["self"] if func is aten.copy_.default else _copy_target(mirror, given)
    if target.device.type == "meta":
        return target
    to: Tensor = host_of(target)
    of: Tensor = host_of(source)
    without_wait = bool(given.get("non_blocking"))
    if not isinstance(source, DeviceTensor):
        of = _upload(mirror, of, to, without_wait)
        read = mirror.host_memory.will_read(of)

        def upload() -> None:
            to.copy_(of)
            read()

        mirror.streams.current.put(upload)
        return target
    if not isinstance(target, DeviceTensor):
        if not (without_wait and mirror.host_memory.is_pinned(to)):
            if without_wait:
                mirror.faults.add("pageable copy", f"to the host, {tuple(of.shape)} {of.dtype}")
            mirror.streams.synchronize(f"download of {tuple(of.shape)} {of.dtype}")
            return to.copy_(of)
        if not mirror.host_memory.is_to_be_read(to):  # else by an upload before it, on the same stream
            poison(to)
    mirror.streams.current.put(lambda: to.copy_(of))
    return target


def _copy_target(mirror: Mirror, given: dict[str, Any]) -> Tensor:
    """New memory for a copy; torch copies to the host into pageable memory."""
    source = given["self"]
    device = source.device if given.get("device") is None else torch.device(given["device"])
    options = {"memory_format": given["memory_format"]} if given.get("memory_format") is not None else {}
    form = torch.empty_like(_meta(source), dtype=given.get("dtype") or source.dtype, **options)
    if device.type == "cuda":
        return mirror.allocate_like(form)
    return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=device)


def _upload(mirror: Mirror, source: Tensor, target: Tensor, without_wait: bool) -> Tensor:
    """The memory that a queued copy to the device reads."""
    facts = f"{tuple(source.shape)} {source.dtype}"
    is_pinned = mirror.host_memory.is_pinned(source)
    # Into strided memory torch copies twice on the device, without the host.
    is_staged = source.dtype != target.dtype or not source.is_contiguous()
    if is_staged and mirror.faults.serving:
        mirror.faults.add("staged copy", f"{facts} {source.stride()} to {target.dtype} {target.stride()}")
    if without_wait and is_pinned and not is_staged:
        if mirror.streams.capturing is not None:
            mirror.faults.add("upload in a capture", facts)
        return source
    if without_wait and not is_pinned and mirror.faults.serving:
        mirror.faults.add("pageable copy", f"to the device, {facts}")
    mirror.streams.wait(f"upload of {facts}, {'page-locked' if is_pinned else 'pageable'}")
    return source.clone()
