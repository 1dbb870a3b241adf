#ifndef BARELLM_DRIVER_H
#define BARELLM_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "barellm.h"

double seconds_now(void);
void warn(const char *form, ...) __attribute__((format(printf, 1, 2)));
void end(const char *form, ...) __attribute__((noreturn, format(printf, 1, 2)));
void must(int wrong); /* ends the program with barellm_error() */
void *room(size_t count, size_t size);
char *option(int argc, char **argv, const char *name, const char *usual);

/* A value of an option: digits alone, or a decimal number; anything else ends the program. */
uint64_t whole(const char *name, const char *value, uint64_t least, uint64_t most);
double number(const char *name, const char *value);

/* The first call of a program. Options are pairs of a name, one of `known`, and a value; for others the usage is printed, and the
 * program ends. */
void start(int argc, char **argv, const char *const *known, const char *usage);

void pin(void);

/* Load the newest checkpoint of a run that is whole. Its step, or -1 where the run has none. */
int64_t resume(barellm *s, const char *run);

#endif
