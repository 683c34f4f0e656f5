"""What all floors above share: checks of arguments, files, processes, and how objects print."""
