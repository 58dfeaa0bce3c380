// Package observe watches, from the kernel, what becomes of the TCP connections
// that processes of this node open: by destination, how many were established,
// refused, timed out, found no way or were given up, how long the SYN's round
// trip took, and how much was sent again.
package observe
