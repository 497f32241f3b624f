// The meeting of `board.h`, as a library for ranks in Python.
#include "board.h"

struct board *open_board(const char *path) { return board_open(path); }

void meet(struct board *board, int rank, int ranks) { board_meet(board, rank, ranks); }
