-- What live leases hold: {most}. Takes nothing. Answers how many there are, and {counter, place, units}, or false when
-- there are more than `most`. Units of a rate count as long as they are in the window. A live record lies a day beyond
-- its lease's expiry in ORDER, a settled one no more than a day beyond its end.
local most = request[1]
local after = '(' .. int(now + DAY)
local live = redis.call('ZCOUNT', ORDER, after, '+inf')
if live > most then return answer('reserved', epoch, now, live, false) end
local sums, list = {}, {}
local ids = redis.call('ZRANGEBYSCORE', ORDER, after, '+inf')
for _, packed in ipairs(#ids > 0 and redis.call('HMGET', LEASES, unpack(ids)) or {}) do
  local record = packed and cmsgpack.unpack(packed)
  for _, part in ipairs(record and record[STATE] == LIVE and record[PARTS] or {}) do
    local place = part[COUNTER] == CALENDAR and part[PLACE] or 0
    if part[COUNTER] ~= RATE or part[PLACE] > second - SPAN then
      local name = part[KEY] .. ' ' .. int(place)
      if not sums[name] then
        sums[name] = {part[KEY], place, 0}
        list[#list + 1] = sums[name]
      end
      sums[name][3] = sums[name][3] + part[UNITS]
    end
  end
end
return answer('reserved', epoch, now, live, list)
