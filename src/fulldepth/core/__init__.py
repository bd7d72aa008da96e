"""Modules that every package uses: errors, files, progress, the console, processes and threads, uncertainty."""
