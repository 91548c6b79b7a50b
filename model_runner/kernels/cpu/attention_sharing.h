// Finds the common prefixes of a batch's decodes from the slot table: the prefix cache gives requests with equal
// beginnings the same pages.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace engine {

constexpr int64_t MIN_SHARED = 64;  // tokens; a shorter shared prefix gets no items of its own: one block of keys

// Positions [start, stop) that are in the same slots for all members: indices of requests, at least 2, ascending.
struct SharedPrefix {
    std::vector<int64_t> members;
    int64_t start, stop;
};

class PrefixFinder {
  public:
    struct Request {
        int64_t row, num_pages;  // whole pages before its first new token
    };

    PrefixFinder(const int32_t* slots, int64_t width, int64_t page_size, std::vector<Request> requests)
        : slots_(slots), width_(width), page_size_(page_size), requests_(std::move(requests)) {}

    // A request may be in several, one after the other, ascending and without gaps from 0.
    //
    // A stack instead of recursion: groups nest as deeply as there are requests of different lengths.
    std::vector<SharedPrefix> find() const {
        int64_t least = (MIN_SHARED + page_size_ - 1) / page_size_;  // pages that are worth it
        std::vector<SharedPrefix> found;
        std::vector<Group> groups;
        std::vector<int64_t> members;
        for (int64_t n = 0; n < int64_t(requests_.size()); ++n)
            if (num_pages(n) >= least) members.push_back(n);
        add_groups(members, 0, 0, groups);
        while (!groups.empty()) {
            Group group = std::move(groups.back());
            groups.pop_back();
            int64_t start = group.start, stop = first_difference(group);
            if (stop - start >= least) {
                found.push_back({group.members, start * page_size_, stop * page_size_});
                start = stop;
            }
            // A request that ends before the next prefix is long enough would cut it short for the others.
            members.clear();
            for (int64_t member : group.members)
                if (num_pages(member) >= std::max(start + least, stop + 1)) members.push_back(member);
            add_groups(members, start, stop, groups);
        }
        return found;
    }

  private:
    // Members share the pages up to `known` and the next one; the end of their prefix is not known yet.
    struct Group {
        std::vector<int64_t> members;
        int64_t start, known;  // pages
    };

    int32_t slot_of(int64_t request, int64_t page) const {
        return slots_[requests_[request].row * width_ + page * page_size_];
    }

    int64_t num_pages(int64_t request) const { return requests_[request].num_pages; }

    // The first page that differs between members.
    int64_t first_difference(const Group& group) const {
        int64_t stop = num_pages(group.members[0]);
        for (int64_t member : group.members) stop = std::min(stop, num_pages(member));
        for (int64_t member : group.members)
            for (int64_t page = group.known; page < stop; ++page)
                if (slot_of(member, page) != slot_of(group.members[0], page)) stop = page;
        return stop;
    }

    // Adds groups of those `members` that share page `known` with another member.
    void add_groups(const std::vector<int64_t>& members, int64_t start, int64_t known, std::vector<Group>& groups) const {
        std::vector<std::pair<int32_t, int64_t>> by_slot;
        for (int64_t member : members) by_slot.push_back({slot_of(member, known), member});
        std::sort(by_slot.begin(), by_slot.end());
        for (size_t last = by_slot.size(); last > 0;) {  // from the last group on: the stack reverses the order
            size_t first = last - 1;
            while (first > 0 && by_slot[first - 1].first == by_slot[last - 1].first) --first;
            if (last - first > 1) {
                Group group{{}, start, known};
                for (size_t n = first; n < last; ++n) group.members.push_back(by_slot[n].second);
                groups.push_back(std::move(group));
            }
            last = first;
        }
    }

    const int32_t* slots_;
    int64_t width_, page_size_;
    std::vector<Request> requests_;
};

}  // namespace engine
