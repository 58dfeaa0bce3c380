package peer

//go:generate go -C ../../tools/proto run . ../../agent/peer fingerpost/peer/v1/peer.proto
