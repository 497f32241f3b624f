//! Groups, plan cache, executor, progress and deadlines of torch-accl.
