// The group of a backend, shared with tasks on completion threads.
#pragma once

#include "accl-py/src/bridge.rs.h"

namespace accl {

struct GroupHandle {
  GroupHandle() : group(bridge::new_group()) {}
  rust::Box<bridge::Group> group;
};

}  // namespace accl
