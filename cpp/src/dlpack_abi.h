// The parts of DLPack's C ABI (version 1, with the exchange API of 1.3) that the package uses, as its specification
// lays them out: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace atomr_cutlass {

constexpr int kDlCpu = 1;
constexpr int kDlCuda = 2;

struct DlDevice {
  int32_t type;
  int32_t id;
};

struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null means row-major contiguous
  uint64_t byte_offset;
};

struct DlVersion {
  uint32_t major;
  uint32_t minor;
};

constexpr DlVersion kDlVersion{1, 0};  // of what is exported

struct DlManaged {  // the unversioned form, capsule "dltensor"
  DlTensor tensor;
  void* manager;
  void (*deleter)(DlManaged*);
};

constexpr uint64_t kDlReadOnly = 1;
constexpr uint64_t kDlCopied = 2;

struct DlManagedVersioned {  // capsule "dltensor_versioned"
  DlVersion version;
  void* manager;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

struct DlExchangeApi {
  DlVersion version;
  DlExchangeApi* previous;
  int (*allocate)(DlTensor* prototype, DlManagedVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, char const* kind, char const* message));
  int (*managed_from_object)(void* object, DlManagedVersioned** out);
  int (*object_from_managed)(DlManagedVersioned* managed, void** out_object);
  int (*view_of_object)(void* object, DlTensor* out);  // non-owning; may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

}  // namespace atomr_cutlass
