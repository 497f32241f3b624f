//! Names of the profiler's events, by style.
//!
//! Owns the names alone; the shim records the events. A call is named by the title of its event, `accl:all_reduce`.

use super::ProfileNames;

impl ProfileNames {
    /// The name of the event of issuing a call.
    pub fn call(self, title: &str) -> String {
        match self {
            Self::Accl => title.to_owned(),
            Self::Ccl => format!("oneccl_bindings_for_pytorch::{}", c10d_name(title)),
            Self::Pg => format!("pg::{}", c10d_name(title)),
        }
    }

    /// The name of the event of waiting for a call of `elements` elements.
    pub fn wait(self, title: &str, elements: i64) -> String {
        match self {
            Self::Accl => format!("accl:wait:{}", collective(title)),
            Self::Ccl => format!("oneccl_bindings_for_pytorch::wait::cpu::{}", c10d_name(title)),
            Self::Pg => format!("pg::wait::{}::sz:{elements}", c10d_name(title)),
        }
    }

    /// The name of the event that has the times of a call's phases.
    pub fn phases(title: &str) -> String {
        format!("accl:phases:{}", collective(title))
    }
}

/// Returns the name of c10d's function: `allreduce` and `alltoall`, but `reduce_scatter`.
pub fn c10d_name(title: &str) -> String {
    let name = collective(title);
    if name.starts_with("all_") { name.replace('_', "") } else { name.to_owned() }
}

/// Returns `all_reduce` for `accl:all_reduce`.
fn collective(title: &str) -> &str {
    title.split_once(':').map_or(title, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_style_has_its_names_of_calls_and_waits() {
        for (style, call, wait) in [
            (ProfileNames::Accl, "accl:all_reduce", "accl:wait:all_reduce"),
            (
                ProfileNames::Ccl,
                "oneccl_bindings_for_pytorch::allreduce",
                "oneccl_bindings_for_pytorch::wait::cpu::allreduce",
            ),
            (ProfileNames::Pg, "pg::allreduce", "pg::wait::allreduce::sz:16"),
        ] {
            assert_eq!((style.call("accl:all_reduce"), style.wait("accl:all_reduce", 16)), (call.into(), wait.into()));
        }
        assert_eq!(ProfileNames::phases("accl:all_to_all"), "accl:phases:all_to_all");
    }

    #[test]
    fn c10d_writes_only_names_with_all_as_one_word() {
        let names = ["accl:all_to_all", "accl:all_gather", "accl:reduce_scatter", "accl:recvAnySource", "barrier"];
        assert_eq!(names.map(c10d_name), ["alltoall", "allgather", "reduce_scatter", "recvAnySource", "barrier"]);
    }
}
