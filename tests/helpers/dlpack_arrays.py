"""Arrays of frameworks that do not exist: DLPack capsules and array interfaces made by hand, over NumPy's memory."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from atomr_cutlass.arrays import numerics
from atomr_cutlass.generator.dtypes import CutlassDtype

_CREATED: list[Any] = []  # capsules and callbacks that C code may still call


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype = ctypes.c_char_p
_get_name.argtypes = (ctypes.py_object,)


def capsule_name(capsule: object) -> str:
    """The name of a capsule, which says whether it has been taken over."""
    return bytes(_get_name(capsule)).decode()


class Array:
    """An array that can be had through DLPack only.

    Attributes:
        deleted: how often its deleter has been called.
        asked: the arguments of every call of `__dlpack__`.
    """

    def __init__(
        self,
        memory: np.ndarray[Any, Any],
        *,
        versioned: bool = True,
        device: tuple[int, int] = (1, 0),
        read_only: bool = False,
        strides: bool = True,
        lanes: int = 1,
        version: int = 1,
        byte_offset: int = 0,
        dtype: tuple[int, int] | None = None,
        knows_versions: bool = True,
        pointer: int | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        element = numerics.from_numpy_dtype(memory.dtype)
        self.memory = memory
        self.versioned = versioned
        self.place = device
        self.read_only = read_only
        self.strides = strides
        self.lanes = lanes
        self.version = version
        self.byte_offset = byte_offset
        self.dtype = dtype or (element.dlpack if element else (5, 8 * memory.itemsize))
        self.knows_versions = knows_versions
        self.pointer = memory.ctypes.data if pointer is None else pointer
        self.shape = tuple(memory.shape if shape is None else shape)
        self.deleted = 0
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **arguments: Any) -> object:
        if "max_version" in arguments and not self.knows_versions:
            message = "__dlpack__() got an unexpected keyword argument 'max_version'"
            raise TypeError(message)
        self.asked.append(arguments)
        rank = len(self.shape)
        shape = (ctypes.c_int64 * max(rank, 1))(*self.shape)
        steps = [s // self.memory.itemsize for s in self.memory.strides] if self.strides else []
        strides = (ctypes.c_int64 * max(rank, 1))(*steps) if self.strides else None
        tensor = _Tensor(
            data=self.pointer - self.byte_offset,
            device=_Device(*self.place),
            ndim=rank,
            dtype=_DataType(*self.dtype, self.lanes),
            shape=shape,
            strides=strides,
            byte_offset=self.byte_offset,
        )

        def delete(_managed: int) -> None:
            self.deleted += 1

        deleter = _Deleter(delete)
        address = ctypes.cast(deleter, ctypes.c_void_p)
        managed: _Managed | _ManagedVersioned
        if self.versioned:
            managed = _ManagedVersioned(self.version, 0, None, address, int(self.read_only), tensor)
        else:
            managed = _Managed(tensor, None, address)
        _CREATED.append((managed, deleter, shape, strides, self.memory))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new_capsule(ctypes.addressof(managed), name, None)


_Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(_Tensor),
    ctypes.POINTER(ctypes.POINTER(_ManagedVersioned)),
    ctypes.c_void_p,
    ctypes.c_void_p,
)
_View = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))
_ObjectFromManaged = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_ManagedVersioned), ctypes.POINTER(ctypes.c_void_p))
_CurrentStream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _ExchangeApi(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", _Allocate),
        ("managed_from_object", ctypes.c_void_p),
        ("object_from_managed", _ObjectFromManaged),
        ("view_of_object", _View),
        ("current_stream", _CurrentStream),
    )


@_Deleter
def _let_go(_managed: int) -> None:
    """Frees nothing: created objects stay."""


@_Allocate
def _allocate(prototype: Any, out: Any, _context: Any, _set_error: Any) -> int:
    wanted = prototype.contents
    size = int(np.prod(wanted.shape[: wanted.ndim], initial=1)) * wanted.dtype.bits // 8
    memory = np.empty(size + 256, np.uint8)
    shape = (ctypes.c_int64 * max(wanted.ndim, 1))(*wanted.shape[: wanted.ndim])
    start = memory.ctypes.data + -memory.ctypes.data % 256
    tensor = _Tensor(start, wanted.device, wanted.ndim, wanted.dtype, shape, None, 0)
    made = _ManagedVersioned(1, 0, None, ctypes.cast(_let_go, ctypes.c_void_p), 0, tensor)
    _CREATED.append((memory, shape, made))
    out[0] = ctypes.pointer(made)
    return 0


@_View
def _view_of(array: Any, out: Any) -> int:
    ctypes.pointer(out.contents)[0] = array.tensor
    return 0


CURRENT_STREAM = [0]
"""The stream that the exchange API says is current."""


@_CurrentStream
def _current_stream(_kind: int, _device: int, out: Any) -> int:
    out[0] = CURRENT_STREAM[0] or None
    return 0


@_ObjectFromManaged
def _object_from_managed(managed: Any, out: Any) -> int:
    tensor = managed.contents.tensor
    element = CutlassDtype.from_dlpack(tensor.dtype.code, tensor.dtype.bits)
    dtype = numerics.numpy_dtype(element) if element else np.dtype(np.uint8)
    shape = tensor.shape[: tensor.ndim]
    size = int(np.prod(shape, initial=1)) * tensor.dtype.bits // 8
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(tensor.data))
    values = memory.view(dtype)
    if tensor.strides:
        steps = [stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim]]
        values = np.lib.stride_tricks.as_strided(values, shape, steps)
    made = Tensor(values.reshape(shape), device=(tensor.device.type, tensor.device.id))
    if managed.contents.deleter:  # of who has given other strides to what the framework has allocated
        _Deleter(managed.contents.deleter)(ctypes.addressof(managed.contents))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # the caller's reference
    out[0] = id(made)
    return 0


_API_NAME = b"dlpack_exchange_api"  # which a capsule refers to
_API = _ExchangeApi(1, 3, None, _allocate, None, _object_from_managed, _view_of, _current_stream)


class Tensor:
    """An array that is read through DLPack's C exchange API, and may require a gradient, as PyTorch's."""

    __dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(_API), _API_NAME, None)

    def __init__(self, memory: np.ndarray[Any, Any], *, device: tuple[int, int] = (1, 0), requires_grad: bool = False):
        """A view of NumPy's memory, wherever it is said to be."""
        element = numerics.from_numpy_dtype(memory.dtype)
        dtype = element.dlpack if element else (1, 8)  # bytes
        self._requires_grad = requires_grad
        self.memory = memory
        self._shape = (ctypes.c_int64 * max(memory.ndim, 1))(*memory.shape)
        self._strides = (ctypes.c_int64 * max(memory.ndim, 1))(
            *(stride // memory.itemsize for stride in memory.strides)
        )
        self.tensor = _Tensor(
            memory.ctypes.data, _Device(*device), memory.ndim, _DataType(*dtype, 1), self._shape, self._strides
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self.memory.shape

    def permute(self, axes: Sequence[int]) -> "Tensor":
        """The tensor with its dimensions in another order."""
        return Tensor(self.memory.transpose(axes), device=(self.tensor.device.type, self.tensor.device.id))

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for the tensor."""
        return self._requires_grad


def another_framework() -> type[Tensor]:
    """A class like `Tensor` with an exchange API of its own, of which nothing is known yet."""

    class Another(Tensor):
        pass

    @_ObjectFromManaged
    def object_from_managed(managed: Any, out: Any) -> int:
        status = _object_from_managed(managed, out)
        ctypes.cast(out[0], ctypes.py_object).value.__class__ = Another
        return int(status)

    api = _ExchangeApi(1, 3, None, _allocate, None, object_from_managed, _view_of, _current_stream)
    _CREATED.append((api, object_from_managed))
    Another.__dlpack_c_exchange_api__ = _new_capsule(ctypes.addressof(api), _API_NAME, None)
    return Another


class CudaArray:
    """An array that can be had through `__cuda_array_interface__` only; its address is never read."""

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        typestr: str = "<f2",
        strides: Sequence[int] | None = None,
        *,
        read_only: bool = False,
        **more: Any,
    ) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": typestr,
            "data": (address, read_only),
            "version": 3,
            "strides": None if strides is None else tuple(strides),
        } | more
