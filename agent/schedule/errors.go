package schedule

import "errors"

var (
	// ErrStopped indicates that the scheduler has stopped, before or after
	// the work was submitted, and the work never ran.
	ErrStopped = errors.New("scheduler has stopped")

	// ErrOverflow indicates that the queue was full and the work was dropped
	// as the oldest of those that nobody needs most.
	ErrOverflow = errors.New("scheduler queue is full")

	// ErrCancelled indicates that Cancel took the work out of the queue.
	ErrCancelled = errors.New("work was cancelled before it ran")
)
