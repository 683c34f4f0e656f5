"""Files: checkpoints, saved solutions and the blocks of a grid."""
