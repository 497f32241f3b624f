/* Constants of mpi.h that are pointers, which the bindings leave out. */
#include <mpi.h>

void *accl_mpi_in_place(void) { return MPI_IN_PLACE; }
