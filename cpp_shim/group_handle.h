// The group of a backend, as bodies on completion threads hold it, too.
#pragma once

#include "accl-py/src/bridge.rs.h"

namespace accl {

struct GroupHandle {
  GroupHandle() : group(bridge::new_group()) {}
  rust::Box<bridge::Group> group;
};

}  // namespace accl
