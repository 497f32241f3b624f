// oneCCL, without MPI: the ranks connect through a file with the address of its key-value store.
#include <oneapi/ccl.hpp>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "rank.h"

namespace {

std::unique_ptr<ccl::communicator> all;
std::shared_ptr<ccl::kvs> store;
std::string version;

// Writes a temporary file and renames it, so that a reader sees either the whole address or no file.
void write_address(const std::string &path, const ccl::kvs::address_type &address) {
  const std::string aside = path + ".new";
  std::ofstream(aside, std::ios::binary).write(address.data(), static_cast<std::streamsize>(address.size()));
  std::rename(aside.c_str(), path.c_str());
}

ccl::kvs::address_type read_address(const std::string &path) {
  ccl::kvs::address_type address;
  for (;;) {
    std::ifstream file(path, std::ios::binary);
    if (file.read(address.data(), static_cast<std::streamsize>(address.size()))) return address;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void call_ccl(const call &call) {
  constexpr auto f32 = ccl::datatype::float32;
  switch (call.collective) {
    case ALL_REDUCE:
      ccl::allreduce(call.output, call.output, call.count, f32, ccl::reduction::sum, *all).wait();
      break;
    case REDUCE_SCATTER:
      ccl::reduce_scatter(call.input, call.output, call.block, f32, ccl::reduction::sum, *all).wait();
      break;
    case ALL_GATHER:
      ccl::allgather(call.input, call.output, call.block, f32, *all).wait();
      break;
    case BROADCAST:
      ccl::broadcast(call.output, call.count, f32, 0, *all).wait();
      break;
    case ALL_TO_ALL:
      ccl::alltoall(call.input, call.output, call.block, f32, *all).wait();
      break;
    case BARRIER:
      ccl::barrier(*all).wait();
      break;
    case COLLECTIVES:
      break;
  }
}

const char *keep(const std::exception &error) {
  static std::string text;
  text = error.what();
  return text.c_str();
}

}  // namespace

extern "C" {

const char *peer_open(const spec *spec) try {
  ccl::init();
  const auto found = ccl::get_library_version();
  version = std::to_string(found.major) + '.' + std::to_string(found.minor) + '.' + std::to_string(found.update);
  const std::string path = std::string(spec->dir) + "/address";
  if (spec->rank == 0) {
    store = ccl::create_main_kvs();
    write_address(path, store->get_address());
  } else {
    store = ccl::create_kvs(read_address(path));
  }
  all = std::make_unique<ccl::communicator>(ccl::create_communicator(spec->ranks, spec->rank, store));
  return nullptr;
} catch (const std::exception &error) {
  return keep(error);
}

const char *peer_call(const call *call) try {
  call_ccl(*call);
  return nullptr;
} catch (const std::exception &error) {
  return keep(error);
}

int peer_has(const call *call) { return call->collective < COLLECTIVES; }

const char *peer_version() { return version.c_str(); }

void peer_close() { all.reset(); }

}  // extern "C"
