#ifndef BARELLM_DRIVER_H
#define BARELLM_DRIVER_H

#include <stddef.h>
#include <stdint.h>

double seconds_now(void);
void end(const char *reason) __attribute__((noreturn));
void must(int wrong); /* ends the program with barellm_error() */
void *room(size_t count, size_t size);
char *option(int argc, char **argv, const char *name, const char *usual);

/* Options are pairs of a name, one of `known`, and a value; for others the usage is printed, and the program ends. */
void check_options(int argc, char **argv, const char *const *known, const char *usage);

void pin(void);

/* The highest step of a folder's checkpoints, or -1. */
int64_t newest(const char *folder);

#endif
