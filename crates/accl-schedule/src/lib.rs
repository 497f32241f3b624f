//! Collective algorithms as data: pure functions from a rank to a schedule, and their symbolic checker.
