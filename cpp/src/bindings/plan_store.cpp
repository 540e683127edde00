#include "plan_store.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace py = pybind11;

namespace atomr_cutlass {
namespace {

// Kinds of words, in their highest byte.
enum Tag : uint64_t { kNone = 1, kBool, kInt, kFloat, kText, kTuple, kList, kObject, kView, kNumber, kShape };

constexpr uint64_t tagged(Tag tag, uint64_t argument, uint64_t more = 0) {
  return uint64_t(tag) << 56 | argument << 40 | more;
}

bool enumeration_member(PyTypeObject* type) {
  static PyObject* const kind = py::object(py::module_::import("enum").attr("EnumMeta")).release().ptr();
  return PyType_IsSubtype(Py_TYPE(type), reinterpret_cast<PyTypeObject*>(kind)) != 0;
}

uint64_t word_of(void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

void PlanStoreKey::spill() {
  spilt_.insert(spilt_.end(), words_.begin(), words_.end());
  count_ = 0;
}

void PlanStoreKey::add_view(uint64_t argument, Operand const& operand) {
  uint64_t const type = uint64_t(operand.dtype.code) << 8 | operand.dtype.bits;
  add(tagged(kView, argument, uint64_t(operand.rank) << 32 | uint64_t(address_alignment(operand.data)) << 24 | type));
  add(uint64_t(operand.device.id));
  for (int i = 0; i < operand.rank; ++i) extents_.emplace_back(operand.shape[i]);
  for (int i = 0; i < operand.rank; ++i) extents_.emplace_back(operand.strides[i]);
}

bool PlanStoreKey::add_shape(uint64_t argument, py::handle value) {
  if (PyTuple_CheckExact(value.ptr()) == 0) return false;
  int64_t extents[kMaxRank];
  Py_ssize_t const rank = PyTuple_GET_SIZE(value.ptr());
  for (Py_ssize_t i = 0; i < rank; ++i) {
    PyObject* const extent = PyTuple_GET_ITEM(value.ptr(), i);
    int overflow = 0;
    if (i == kMaxRank || PyLong_CheckExact(extent) == 0) return false;
    extents[i] = PyLong_AsLongLongAndOverflow(extent, &overflow);
    if (overflow != 0) return false;
  }
  add(tagged(kShape, argument, uint64_t(rank)));
  for (Py_ssize_t i = 0; i < rank; ++i) extents_.emplace_back(extents[i]);
  return true;
}

void PlanStoreKey::add_text(uint64_t argument, std::string_view text) {
  add(tagged(kText, argument, text.size()));
  for (size_t begin = 0; begin < text.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + begin, std::min(sizeof(word), text.size() - begin));
    add(word);
  }
}

void PlanStoreKey::add_number(uint64_t argument) { add(tagged(kNumber, argument)); }

void PlanStoreKey::add_list(uint64_t argument, size_t size) { add(tagged(kList, argument, size)); }

bool PlanStoreKey::add_option(uint64_t argument, py::handle value) {
  PyObject* const object = value.ptr();
  if (object == Py_None) {
    add(tagged(kNone, argument));
  } else if (PyBool_Check(object) != 0) {
    add(tagged(kBool, argument, object == Py_True));
  } else if (PyLong_CheckExact(object) != 0) {
    int overflow = 0;
    long long const number = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) return false;
    add(tagged(kInt, argument));
    add(uint64_t(number));
  } else if (PyFloat_CheckExact(object) != 0) {
    uint64_t bits = 0;
    double const number = PyFloat_AS_DOUBLE(object);
    std::memcpy(&bits, &number, sizeof(bits));
    add(tagged(kFloat, argument));
    add(bits);
  } else if (PyUnicode_CheckExact(object) != 0) {
    Py_ssize_t size = 0;
    char const* const text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) throw py::error_already_set();
    add_text(argument, {text, size_t(size)});
  } else if (bool const tuple = PyTuple_Check(object) != 0; tuple || PyList_CheckExact(object) != 0) {
    // A list is what it holds now; its members may be exchanged while one of them is hashed.
    // One that holds itself has no end.
    struct Depth {
      Depth() {
        if (Py_EnterRecursiveCall(" in an option") != 0) throw py::error_already_set();
      }
      ~Depth() { Py_LeaveRecursiveCall(); }
    } const depth;
    Py_ssize_t const size = PySequence_Fast_GET_SIZE(object);
    add(tagged(tuple ? kTuple : kList, argument, uint64_t(size)));
    add(word_of(Py_TYPE(object)));
    for (Py_ssize_t i = 0; i < size && i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!add_option(argument, py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object, i)))) return false;
    }
  } else {
    return add_object(argument, value);
  }
  return true;
}

bool PlanStoreKey::add_object(uint64_t argument, py::handle value) {
  if (PyCallable_Check(value.ptr()) != 0) return false;  // it may compute something else next time
  PyTypeObject* const type = Py_TYPE(value.ptr());
  // What hashes by its identity may hold something else next time.
  if (type->tp_hash == PyBaseObject_Type.tp_hash && !enumeration_member(type)) return false;
  add(tagged(kObject, argument));
  add(word_of(type));
  if (enumeration_member(type)) {
    add(word_of(value.ptr()));  // whose own hash is Python's code
  } else {
    Py_hash_t const hash = PyObject_Hash(value.ptr());
    if (hash == -1) throw py::error_already_set();
    add(uint64_t(hash));
  }
  objects_.push_back(py::reinterpret_borrow<py::object>(value));
  return true;
}

uint64_t PlanStoreKey::hash(bool family) const {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;
  // Side by side: each waits for its own products alone.
  uint64_t lanes[] = {1, 2, 3, 4};
  auto const mix = [&lanes](auto const* words, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      uint64_t& lane = lanes[i % 4];
      lane = (lane ^ uint64_t(words[i])) * kFactor;
    }
  };
  mix(spilt_.data(), spilt_.size());
  mix(words_.data(), count_);
  if (!family) mix(extents_.data(), extents_.size());
  uint64_t made = 0;
  for (uint64_t const lane : lanes) made = (made ^ lane ^ lane >> 32) * kFactor;
  return made ^ made >> 29;
}

bool PlanStoreKey::same_words(PlanStoreKey const& other, bool family) const {
  return count_ == other.count_ && std::equal(words_.begin(), words_.begin() + count_, other.words_.begin()) &&
         spilt_ == other.spilt_ &&
         (family || std::equal(extents_.begin(), extents_.end(), other.extents_.begin(), other.extents_.end()));
}

bool PlanStoreKey::same_objects(PlanStoreKey const& other) const {
  if (objects_.size() != other.objects_.size()) return false;
  for (size_t i = 0; i < objects_.size(); ++i) {
    int const same = PyObject_RichCompareBool(objects_[i].ptr(), other.objects_[i].ptr(), Py_EQ);
    if (same < 0) throw py::error_already_set();
    if (same == 0) return false;
  }
  return true;
}

std::shared_ptr<PlanStoreKey const> PlanStoreKey::moved() {
  auto made = std::make_shared<PlanStoreKey>();
  made->count_ = count_;
  std::copy_n(words_.begin(), count_, made->words_.begin());
  made->spilt_ = std::move(spilt_);
  for (int64_t const extent : extents_) made->extents_.emplace_back(extent);
  made->objects_ = std::move(objects_);
  return made;
}

std::shared_ptr<CachedLaunch const> PlanFamily::find(PlanStoreKey const& key, std::vector<Number>& numbers) {
  auto const found = programs_.find(key.extents().data(), key.extents().size(), numbers);
  ++(found ? served_ : missed_);
  return found ? launches_[*found] : nullptr;
}

void PlanFamily::add(std::vector<Instruction> const& program, CachedLaunch launch) {
  decltype(launches_) dropped;  // whose end may run Python's code
  if (!programs_.add(program, launches_.size())) {
    // What the earlier ones were noted of has changed, such as the kernels that are ranked.
    programs_ = {};
    dropped.swap(launches_);
    programs_.add(program, 0);
  }
  launches_.push_back(std::make_shared<CachedLaunch const>(std::move(launch)));
}

void StoredPlan::note_layouts() {
  laid_out = launch != nullptr && sources.size() == launch->slots().size();
  for (size_t i = 0; laid_out && i < sources.size(); ++i) {
    Operand const& layout = sources[i].layout;
    laid_out = !layout.given() || matches(layout, launch->slots()[i].spec.layout);
  }
}

bool StoredPlan::superseded() const {
  return launch != nullptr ? launch->superseded() : plan.attr("superseded").cast<bool>();
}

PlanStore::PlanStore(size_t capacity) : capacity_(capacity) {
  enumeration_member(&PyLong_Type);  // finds the metaclass now: not while another thread waits for that with the GIL
}

std::shared_ptr<StoredPlan const> PlanStore::find(PlanStoreKey const& key) {
  // Loops come back with the call that came last: that spares the hash.
  if (order_.empty() || !order_.front().key->same_words(key)) {
    auto const place = places_.find({&key, key.hash()});
    if (place == places_.end()) return nullptr;
    order_.splice(order_.begin(), order_, place->second);
  }
  auto found = order_.front().plan;
  if (!key.has_objects()) return found;
  // Comparing may run Python's code, which may have other threads change the store.
  auto const kept = order_.front().key;
  return kept->same_objects(key) ? found : nullptr;
}

std::shared_ptr<PlanFamily> PlanStore::family(std::shared_ptr<PlanStoreKey const> const& key) {
  Reference const reference{key.get(), key->hash(true)};
  auto const place = families_.find(reference);
  if (place == families_.end()) {
    Families dropped;  // whose end may run Python's code
    if (families_.size() >= capacity_ || learned_ >= kLaunchesAtMost) {
      dropped.swap(families_);
      learned_ = 0;
    }
    auto made = std::make_shared<PlanFamily>(key);
    families_.emplace(reference, made);
    return made;
  }
  auto found = place->second;
  if (!key->has_objects()) return found;
  return found->member().same_objects(*key) ? found : nullptr;
}

void PlanStore::learn(PlanFamily& family, std::vector<Instruction> const& program, CachedLaunch launch) {
  ++learned_;
  family.add(program, std::move(launch));
}

void PlanStore::put(std::shared_ptr<PlanStoreKey const> key, std::shared_ptr<StoredPlan const> plan) {
  // Destroying a plan gives the GIL up: what is dropped lives until the store is in order again.
  Order dropped;
  Reference const reference{key.get(), key->hash()};
  auto const place = places_.find(reference);
  if (place != places_.end()) {
    dropped.splice(dropped.end(), order_, place->second);
    places_.erase(place);
  }
  order_.push_front({std::move(key), std::move(plan)});
  places_.emplace(reference, order_.begin());
  while (order_.size() > capacity_) {
    places_.erase({order_.back().key.get(), order_.back().key->hash()});
    dropped.splice(dropped.end(), order_, std::prev(order_.end()));
  }
}

void PlanStore::clear() {
  Order dropped;
  ++cleared_;
  places_.clear();
  dropped.swap(order_);
  Families families;
  families.swap(families_);
  learned_ = 0;
}

py::list PlanStore::plans() const {
  py::list found;
  for (Kept const& kept : order_) found.append(kept.plan->plan);
  return found;
}

}  // namespace atomr_cutlass
